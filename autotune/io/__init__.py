"""Files, folders and documents: read and written so that nothing is lost and nothing foreign runs."""
