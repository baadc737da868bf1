"""The people of a tenant, in the tenant's own database."""
