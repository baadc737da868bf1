"""Real databases and object stores: SQLite files, a PostgreSQL and an S3 that come from wheels."""
