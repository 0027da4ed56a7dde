//! `nacre cage`: its command line ([`command`], [`plan`], [`settings`]: pure), the actions and
//! their output ([`run`], [`status`], [`metrics`]). The engines of cages are in
//! `nacre_daemon::cage`.

pub mod command;
pub mod metrics;
pub mod plan;
pub mod run;
pub mod settings;
pub mod status;
