# Targets: `tidemark` holds every daemon and has neither Java nor Spark; `tidemark-spark` runs the lake jobs, the demo and
# verify; `etcd` and `prometheus` are those that deploy/compose.yaml starts where no registry has them.
#
# BASE_IMAGE is any Debian 12 with Python 3.11, best named by its digest (…@sha256:…), so that a later build is the same.
# Certificates in deploy/ca/*.crt are trusted during the build and afterwards.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base
ENV DEBIAN_FRONTEND=noninteractive
COPY deploy/ca/ /usr/local/share/ca-certificates/
# tini is process 1: it hands on SIGTERM, and reaps the children of processes that have ended.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates tini \
 && update-ca-certificates \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

FROM base AS etcd
RUN apt-get update \
 && apt-get install -y --no-install-recommends etcd-server etcd-client \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && useradd --system --uid 10002 --create-home --home-dir /var/lib/tidemark-etcd runner
USER 10002
VOLUME ["/var/lib/tidemark-etcd"]
ENTRYPOINT ["tini", "--", "etcd"]

FROM base AS prometheus
RUN apt-get update \
 && apt-get install -y --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && useradd --system --uid 10003 --create-home --home-dir /var/lib/tidemark-prometheus runner
USER 10003
WORKDIR /var/lib/tidemark-prometheus
VOLUME ["/var/lib/tidemark-prometheus"]
ENTRYPOINT ["tini", "--", "prometheus"]

# What the images of our own daemons share. Every daemon shows its metrics and its health at port 8080, where probes and
# `tidemark health ROLE` find it. The root may be read-only: daemons write to /data and /tmp, lake jobs also to /lake.
FROM base AS runtime
RUN useradd --system --uid 10001 --create-home --home-dir /home/tidemark tidemark \
 && mkdir -p /data /lake \
 && chown tidemark /data /lake
ENV PATH=/opt/tidemark/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    TIDEMARK_COORDINATOR_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_STORE_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_CAPTURE_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_PUMP_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_GC_WORKER_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_SPARK_HTTP_ADDR=0.0.0.0:8080 \
    TIDEMARK_SPARK_KEEP_HTTP_ADDR=0.0.0.0:8080
WORKDIR /home/tidemark
VOLUME ["/data", "/lake"]
EXPOSE 8080
ENTRYPOINT ["tini", "--", "tidemark"]
CMD ["--help"]

# Slim bases have no manuals, and Java's package wants their directory.
FROM runtime AS runtime-spark
RUN mkdir -p /usr/share/man/man1 \
 && apt-get update \
 && apt-get install -y --no-install-recommends openjdk-17-jre-headless \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin

# Packages come before the code, so that a change of the code does not install them again.
FROM base AS packages
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -c "import ensurepip, venv" \
 || (apt-get update && apt-get install -y --no-install-recommends python3-venv)
RUN python3 -m venv /opt/tidemark
COPY deploy/daemon.lock /src/deploy/
RUN /opt/tidemark/bin/pip install --require-hashes -r /src/deploy/daemon.lock

FROM packages AS build
COPY . /src
RUN /opt/tidemark/bin/pip install --no-deps --no-build-isolation /src /src/sink/spark \
 && /src/deploy/slim-venv /opt/tidemark

FROM packages AS packages-spark
COPY deploy/spark.lock /src/deploy/
RUN /opt/tidemark/bin/pip install --require-hashes -r /src/deploy/spark.lock

FROM runtime-spark AS build-spark
ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
COPY --from=packages-spark /opt/tidemark /opt/tidemark
COPY . /src
RUN /opt/tidemark/bin/pip install --no-deps --no-build-isolation /src /src/sink/spark \
 && /opt/tidemark/bin/python -m pyspark_tidemark.jars --no-class-archive all \
 && rm -rf /root/.ivy2* /root/.m2 \
 && /src/deploy/slim-venv /opt/tidemark

FROM runtime AS tidemark
COPY --from=build /opt/tidemark /opt/tidemark
USER 10001
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tidemark" \
      org.opencontainers.image.description="Coordinator, store, capture, pump and GC worker, and the command line" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM runtime-spark AS tidemark-spark
COPY --from=build-spark /opt/tidemark /opt/tidemark
USER 10001
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tidemark for Spark" \
      org.opencontainers.image.description="Spark jobs that keep the lakes of Tidemark's changefeeds current" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
