# docker buildx bake --file components/docker-bake.hcl [--push]
# Builds both images for both architectures. Run it in the root of the repository, with REGISTRY, TAG and
# COMMIT=$(git rev-parse HEAD) in the environment. Runs in the image record COMMIT.
variable "REGISTRY" { default = "ghcr.io/flexfleet" }
variable "TAG" { default = "0.1.0" }
variable "COMMIT" { default = "" }

group "default" { targets = ["flexfleet", "mlflow"] }

target "_common" {
  context    = "."
  dockerfile = "components/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
}

target "flexfleet" {
  inherits = ["_common"]
  target   = "flexfleet"
  args     = { COMMIT = "${COMMIT}" }
  tags     = ["${REGISTRY}/flexfleet:${TAG}"]
}

target "mlflow" {
  inherits = ["_common"]
  target   = "mlflow"
  tags     = ["${REGISTRY}/flexfleet-mlflow:${TAG}"]
}
