//! Unions that are served: where they can stand ([`place`]), what can be asked of them
//! ([`requests`]), and who answers ([`serving`]).

pub mod absent;
pub mod balancing;
pub mod place;
pub mod report;
pub mod requests;
pub mod serving;
pub mod tiering;
