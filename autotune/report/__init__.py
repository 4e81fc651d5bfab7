"""Reports: pages, figures, tables and exported plans."""
