"""The gRPC kit: calls, servers, their guard, health and deadlines."""
