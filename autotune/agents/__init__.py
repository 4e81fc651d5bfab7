"""What decides: rules, searches and policies."""
