# One image for every daemon and for the Spark job; two more targets hold the etcd and the Prometheus of deploy/compose.yaml.
# BASE_IMAGE is any Debian 12 with Python 3.11; certificates in deploy/ca/*.crt are trusted during the build and afterwards.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY deploy/ca/ /usr/local/share/ca-certificates/
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates openjdk-17-jre-headless \
 && update-ca-certificates \
 && rm -rf /var/lib/apt/lists/*
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt

FROM base AS etcd
RUN apt-get update && apt-get install -y --no-install-recommends etcd-server etcd-client && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10002 --create-home --home-dir /var/lib/tidemark-etcd runner
USER 10002
ENTRYPOINT ["etcd"]

FROM base AS prometheus
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
 && useradd --system --uid 10003 --create-home --home-dir /var/lib/tidemark-prometheus runner
USER 10003
WORKDIR /var/lib/tidemark-prometheus
ENTRYPOINT ["prometheus"]

FROM base AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/tidemark
COPY deploy/requirements.lock /src/deploy/requirements.lock
RUN /opt/tidemark/bin/pip install --no-cache-dir --require-hashes -r /src/deploy/requirements.lock
COPY pyproject.toml README.md /src/
COPY proto/gen /src/proto/gen
COPY server /src/server
COPY storage /src/storage
COPY sorter /src/sorter
COPY sink /src/sink
COPY gcsafepoint /src/gcsafepoint
RUN /opt/tidemark/bin/pip install --no-cache-dir --no-deps --no-build-isolation /src /src/sink/spark
RUN /opt/tidemark/bin/python -m pyspark_tidemark.jars --no-class-archive && rm -rf /root/.ivy2* /root/.m2

FROM base AS tidemark
RUN useradd --system --uid 10001 --create-home --home-dir /home/tidemark tidemark \
 && mkdir -p /data /lake && chown tidemark /data /lake
COPY --from=build /opt/tidemark /opt/tidemark
ENV PATH=/opt/tidemark/bin:$PATH
USER 10001
WORKDIR /home/tidemark
VOLUME ["/data", "/lake"]
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=6 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/healthz', timeout=2)"]
ENTRYPOINT ["tidemark"]
CMD ["--help"]
