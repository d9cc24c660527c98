"""The gRPC kit: clients, servers, guard, health and deadlines."""
