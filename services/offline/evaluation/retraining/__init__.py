"""Does the gate of `freshet retrain` tell models apart? On simulated people, where it is known which is better."""
