"""The base of every process: settings, errors, logs, metrics, the gRPC kit, and access to Kafka and Redis.

It knows neither `services.algorithms` nor any process. Importing a module opens no connection, reads no environment
and configures no logging.
"""
