"""Customers' own servers, told what became of their jobs."""
