//! The command line of `nacre-volumes`: its table, which the help and the man pages are made from.

use clap::{Arg, ArgAction, Command, builder::PathBufValueParser};
use std::path::PathBuf;

/// The whole command.
pub fn command() -> Command {
    Command::new("nacre-volumes")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Volumes of nacre for docker and podman")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .arg(
            Arg::new("state")
                .long("state")
                .value_name("DIR")
                .global(true)
                .value_parser(PathBufValueParser::new())
                .help("The state directory [default: /var/lib/nacre-volumes, or ~/.local/state/nacre-volumes]"),
        )
        .arg(
            Arg::new("nacre")
                .long("nacre")
                .value_name("PROGRAM")
                .global(true)
                .value_parser(PathBufValueParser::new())
                .help("The program nacre [default: the one beside this program, or that of PATH]"),
        )
        .subcommand(Command::new("serve").about("Serve the volume plugin of docker and podman").arg(
            Arg::new("socket").long("socket").value_name("PATH").value_parser(PathBufValueParser::new()).help(
                "The socket [default: that of systemd, /run/docker/plugins/nacre.sock, or \
                     $XDG_RUNTIME_DIR/nacre-volumes.sock]",
            ),
        ))
        .subcommand(
            Command::new("list")
                .about("List the volumes, with use and limits")
                .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("As JSON")),
        )
        .subcommand(Command::new("metrics").about("Print the metrics of all volumes, for Prometheus"))
        .subcommand(
            Command::new("tend")
                .about("Put in order what a kill or a reboot left, as the plugin does every minute")
                .arg(
                    Arg::new("backup").long("backup").action(ArgAction::SetTrue).help("Run backups that are due, too"),
                ),
        )
        .subcommand(
            Command::new("release")
                .about("Take back the mounts of a volume that no container uses any more")
                .arg(Arg::new("volume").value_name("VOLUME").required(true).help("The volume"))
                .arg(Arg::new("caller").value_name("ID").help("Of this caller [default: of all]")),
        )
        .subcommand(
            Command::new("man")
                .about("Write the man pages into a directory")
                .hide(true)
                .arg(Arg::new("directory").value_name("DIR").required(true).value_parser(PathBufValueParser::new())),
        )
        .after_help(EXAMPLES)
}

const EXAMPLES: &str = "\
Examples:
  nacre-volumes serve
  docker volume create -d nacre -o size=10G uploads
  docker volume create -d nacre -o size=10G -o files=100000 -o owner=1000:1000 home
  docker volume create -d nacre -o pool=tank -o size=50G -o compression=zstd database
  docker volume create -d nacre -o pool=tank -o from=database trial
  docker volume create -d nacre -o pool=tank -o backup=lan:vault/mail mail
  docker run --rm -v uploads:/data debian df -h /data
  podman unshare nacre-volumes serve
  nacre-volumes list
  nacre-volumes release uploads

podman: volume_plugins in containers.conf has to name the socket. Ordinary users serve inside of
`podman unshare`. All options: docs/volumes.md.";

/// Where the state is by default: the machine's for root, the user's for others.
pub fn default_state() -> Option<PathBuf> {
    if is_root() {
        return Some(PathBuf::from("/var/lib/nacre-volumes"));
    }
    if let Some(state) = variable("XDG_STATE_HOME") {
        return Some(state.join("nacre-volumes"));
    }
    Some(variable("HOME")?.join(".local/state/nacre-volumes"))
}

/// Where the socket is by default.
pub fn default_socket() -> Option<PathBuf> {
    if is_root() {
        return Some(PathBuf::from("/run/docker/plugins/nacre.sock"));
    }
    Some(variable("XDG_RUNTIME_DIR")?.join("nacre-volumes.sock"))
}

/// The program nacre beside this one, or by its name.
pub fn default_nacre() -> PathBuf {
    if let Ok(own) = std::env::current_exe() {
        let beside = own.with_file_name("nacre");
        if beside.exists() {
            return beside;
        }
    }
    PathBuf::from("nacre")
}

/// Whether this is root of a machine or container, not an ordinary user in `podman unshare`.
fn is_root() -> bool {
    std::env::var_os("_CONTAINERS_USERNS_CONFIGURED").is_none() && rustix::process::geteuid().is_root()
}

/// An absolute path from the environment.
fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}
