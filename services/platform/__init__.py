"""The base of every process; it knows neither `services.algorithms` nor any process.

Importing a module opens no connection, reads no environment and configures no logging.
"""
