"""The one door: submit, start, finish, cancel. Joins the tenant's side and the central side."""
