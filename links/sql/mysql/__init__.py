"""MySQL and MariaDB, by PyMySQL in threads."""
