//! Tests of the program `nacre-volumes` as a whole: by a client of docker's protocol, by podman, killed
//! between and inside calls, and by hostile clients. They drive the real `nacre`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod calls;
mod fixture;
mod hostile;
mod kills;
mod podman;
mod pools;
