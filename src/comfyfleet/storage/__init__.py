"""Objects by key: a local folder with URLs signed by us, or S3 with presigned ones."""
