"""Real databases for tests: SQLite files, and a PostgreSQL that comes from a wheel."""
