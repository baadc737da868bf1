"""Background work: sweeps, retention, erasure, and checks of files and ledger.

Internal: may change without notice.
"""
