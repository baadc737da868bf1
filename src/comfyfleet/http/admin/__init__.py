"""The operators' API: everything under /api/admin, behind the admin key."""
