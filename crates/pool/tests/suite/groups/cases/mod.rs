//! Parts of the tests of groups of devices (`groups.rs`).

pub mod cuts;
pub mod fused;
mod missing;
mod reshape;
pub mod scattered;
mod shapes;
