"""Calls to addresses that a customer names: public ones only, and never by a worker."""
