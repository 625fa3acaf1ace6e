# A small image for CPUs: "docker build --tag manydg ." then "docker run --rm --volume $PWD:/data manydg --help".
FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# PyTorch's CPU build first, at the pinned version: the default one brings gigabytes for GPUs.
RUN python -m venv /opt/manydg \
    && /opt/manydg/bin/pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" --index-url https://download.pytorch.org/whl/cpu \
    && /opt/manydg/bin/pip install --no-cache-dir --constraint constraints.txt ".[onnx,boosting,serve]"

FROM python:3.12-slim
# LightGBM and scikit-learn compute with OpenMP.
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 manydg && mkdir /data && chown manydg /data
COPY --from=build /opt/manydg /opt/manydg
ENV PATH=/opt/manydg/bin:$PATH MPLCONFIGDIR=/tmp
USER manydg
WORKDIR /data
ENTRYPOINT ["manydg"]
CMD ["--help"]
