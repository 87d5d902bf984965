"""Reports for users: tables in the terminal, and a self-contained HTML page."""
