"""Files, folders and documents: writes are durable, and reads never run foreign code."""
