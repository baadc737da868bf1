"""Real object stores for tests: a folder served by uvicorn, and an S3 that comes from a wheel."""
