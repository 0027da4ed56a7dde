//! Unions that are served: checks of their directories ([`place`]), requests to them ([`requests`]), and answers
//! ([`serving`]).

pub mod absent;
pub mod balancing;
pub mod place;
pub mod report;
pub mod requests;
pub mod serving;
pub mod tiering;
