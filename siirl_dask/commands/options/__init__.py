"""Options of commands, apart from what the commands import."""
