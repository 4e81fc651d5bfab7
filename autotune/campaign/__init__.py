"""What commands are made of: run directories, tracking, tuning, arms, comparing."""
