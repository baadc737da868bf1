"""Real databases and object stores: SQLite files, and a PostgreSQL and an S3 server installed from wheels."""
