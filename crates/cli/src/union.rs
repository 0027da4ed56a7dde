//! `nacre union`: what its command line asks for ([`command`], [`plan`]: pure), and its verbs, which
//! ask the process that serves a union ([`run`]). Who answers is in `nacre_daemon::union`.

pub mod balancing;
pub mod command;
pub mod list;
pub mod metrics;
pub mod plan;
pub mod run;
