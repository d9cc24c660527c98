"""What every process stands on: settings, errors, logs, metrics, the gRPC kit, and the stream and state stores.

It knows neither `services.algorithms` nor any process. Importing a module opens no connection, reads no environment
and configures no logging.
"""
