"""Tenants, their users and API keys, operators, and the wallets that jobs are paid from.

Internal: may change without notice.
"""
