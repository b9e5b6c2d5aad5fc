"""What the server tells of itself: log lines, metrics, tables for the terminal."""
