"""Queue tables in a SQLite file. Nothing outside of this folder imports it by name, but for `Table.ddl`."""
