"""What the financial core tells the outside: every public event, and in place of some internal ones a shorter one."""
