"""The base of every process. Importing a module opens no connection, reads no environment, configures no logging."""
