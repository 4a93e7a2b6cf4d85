# An image with fsdp built and installed, its headers and CMake package included.
#
#   docker build -t fsdp .   (with CUDA: docs/install.md)
#   docker run --rm --ipc=host -v "$PWD:/work" fsdp train
#
# The script installs all packages and LibTorch, so nothing is listed here.
ARG BASE=debian:12
FROM ${BASE}
ARG FLAVOUR=cpu

# The cache holds LibTorch and must be readable for every user. pip's and ccache's own caches would
# only be copies. Tests aren't part of the image.
ENV XDG_CACHE_HOME=/opt/cache FSDP_FLAVOUR=${FLAVOUR} FSDP_CMAKE_ARGS=-DFSDP_TESTS=OFF \
  PIP_NO_CACHE_DIR=1 CCACHE_DISABLE=1
WORKDIR /opt/fsdp.cpp

# Packages and LibTorch: fetched again only when the script changes.
COPY fsdp ./
RUN ./fsdp deps && rm -rf /var/lib/apt/lists/*

# Editing documents or tests builds nothing.
COPY CMakeLists.txt LICENSE ./
COPY cmake cmake/
COPY configs configs/
COPY include include/
COPY bench/peers bench/peers/
COPY bench/rows.json bench/
COPY src src/
RUN ./fsdp doctor && cmake --install build/release && install -d -m 1777 /work

WORKDIR /work
ENTRYPOINT ["fsdp"]
CMD ["--help"]
