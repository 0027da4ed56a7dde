//! `nacre cage`: what its command line asks for ([`command`], [`plan`], [`settings`]: pure), and what
//! is done and printed ([`run`], [`status`], [`metrics`]). What holds cages is in
//! `nacre_daemon::cage`.

pub mod command;
pub mod metrics;
pub mod plan;
pub mod run;
pub mod settings;
pub mod status;
