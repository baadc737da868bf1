"""Control planes in this process and in others, their customers, operators and HTTP."""
