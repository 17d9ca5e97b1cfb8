"""Parts that every command shares: its line is read, it ends, it writes files."""

__all__ = ["ending", "interrupts", "parsing"]
