"""Records of a run on disk and in MLflow: its folder, documents, journal and verdicts."""
