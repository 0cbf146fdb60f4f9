"""Queue tables on PostgreSQL."""
