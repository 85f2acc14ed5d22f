# docker buildx bake --file components/docker-bake.hcl [--push]
# Both images for both architectures; run it in the repository's root. REGISTRY=... TAG=... in the environment.
variable "REGISTRY" { default = "ghcr.io/flexfleet" }
variable "TAG" { default = "0.1.0" }

group "default" { targets = ["flexfleet", "mlflow"] }

target "_common" {
  context    = "."
  dockerfile = "components/Dockerfile"
  platforms  = ["linux/amd64", "linux/arm64"]
}

target "flexfleet" {
  inherits = ["_common"]
  target   = "flexfleet"
  tags     = ["${REGISTRY}/flexfleet:${TAG}"]
}

target "mlflow" {
  inherits = ["_common"]
  target   = "mlflow"
  tags     = ["${REGISTRY}/flexfleet-mlflow:${TAG}"]
}
