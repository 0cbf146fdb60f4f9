"""Queue tables on MySQL and MariaDB."""
