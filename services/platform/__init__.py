"""Code that every process uses. Importing a module opens no connection, reads no environment, configures no logging."""
