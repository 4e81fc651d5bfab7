"""What a run leaves on disk and in MLflow: its folder, its documents, its journal, its verdicts."""
