"""The leased queue, central rows only: enqueue, lease, extend, end, expire."""
