#!/usr/bin/env bash
# What some tests need beside Python, on Debian as root: Chromium opens the report's page, TeX compiles its tables, and
# a Slurm of two nodes runs what `submit` hands over.
# Without them those tests are skipped and say so. Installs only what is missing; about two minutes from nothing.
set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v pdflatex >/dev/null || missing+=(texlive-latex-recommended)
kpsewhich siunitx.sty >/dev/null 2>&1 || missing+=(texlive-science)
PATH="$PATH:/usr/sbin" command -v slurmctld >/dev/null || missing+=(slurm-wlm)
PATH="$PATH:/usr/sbin" command -v munged >/dev/null || missing+=(munge)
[[ ${#missing[@]} -eq 0 ]] && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "not installed, and apt-get as root is needed for it: ${missing[*]}" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
