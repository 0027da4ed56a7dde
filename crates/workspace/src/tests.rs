//! Tests over real directories and unions without mounts.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod commit;
mod conflicts;
mod histories;
mod labels;
mod layers;
mod nested;
mod overwriting;
mod patches;
mod several;
mod support;
mod surroundings;
