"""Parts that every command shares: its line is read, it ends, it writes files."""
